// castiron emit --kernel gemv --shape 32x64 --codec q4_1 --isa avx2 --threads 2
// 1218 lines, sha256 7fd816c025ae684f2856cf65dbfe038fb35d00b93c923b0982e22c2a89ab935a
          %162:4 = scf.for %157 = %c0 to %c1 step %c1 iter_args(%158 = %152, %159 = %153, %160 = %154, %161 = %155) -> (vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>) {
            %163 = arith.addi %151, %c9 : index
            %164 = arith.divui %163, %c2 : index
            %165 = arith.muli %164, %c2 : index
            %166 = arith.remui %163, %c2 : index
            %167 = arith.addi %144, %165 : index
            %168 = arith.addi %146, %165 : index
            %169 = arith.addi %144, %165 : index
            %170 = arith.addi %146, %165 : index
            %171 = arith.addi %144, %165 : index
            %172 = arith.addi %146, %165 : index
            %173 = arith.addi %144, %165 : index
            %174 = arith.addi %146, %165 : index
            %175 = arith.addi %144, %165 : index
            %176 = arith.addi %146, %165 : index
            %177 = arith.subi %151, %c0 : index
            %178 = vector.load %m1[%144, %151, %c0] : memref<2x2x320xi8>, vector<16xi8>
            %179 = vector.bitcast %178 : vector<16xi8> to vector<8xf16>
            %180 = arith.extf %179 : vector<8xf16> to vector<8xf32>
            %181 = vector.load %m1[%144, %151, %c7] : memref<2x2x320xi8>, vector<16xi8>
            %182 = vector.bitcast %181 : vector<16xi8> to vector<8xf16>
            %183 = arith.extf %182 : vector<8xf16> to vector<8xf32>
            %184 = vector.broadcast %c22 : i32 to vector<8xi32>
            %185 = arith.muli %177, %c10 : index
            %186 = vector.load %m1[%144, %151, %c3] : memref<2x2x320xi8>, vector<32xi8>
            %187 = vector.bitcast %186 : vector<32xi8> to vector<8xi32>
            %188 = arith.andi %187, %c23 : vector<8xi32>
            %189 = vector.bitcast %188 : vector<8xi32> to vector<32xi8>
            %190 = memref.load %8[%c0, %185] : memref<1x48xi32>
            %191 = vector.broadcast %190 : i32 to vector<8xi32>
            %192 = vector.bitcast %191 : vector<8xi32> to vector<32xi8>
            %193 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%189, %192) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
            %194 = arith.shrui %187, %c24 : vector<8xi32>
            %195 = arith.andi %194, %c23 : vector<8xi32>
            %196 = vector.bitcast %195 : vector<8xi32> to vector<32xi8>
            %197 = arith.addi %185, %c1 : index
            %198 = memref.load %8[%c0, %197] : memref<1x48xi32>
            %199 = vector.broadcast %198 : i32 to vector<8xi32>
            %200 = vector.bitcast %199 : vector<8xi32> to vector<32xi8>
            %201 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%196, %200) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
// 929 lines more
            %1121 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.wd"(%1120, %c28) : (vector<16xi16>, vector<16xi16>) -> vector<8xi32>
            %1122 = arith.addi %1052, %1121 : vector<8xi32>
            %1123 = arith.shli %1051, %c20 : vector<8xi32>
            %1124 = arith.addi %1123, %1122 : vector<8xi32>
            %1125 = arith.sitofp %1124 : vector<8xi32> to vector<8xf32>
            %1126 = arith.mulf %1125, %897 : vector<8xf32>
            %1127 = llvm.call_intrinsic "llvm.arithmetic.fence"(%1126) : (vector<8xf32>) -> vector<8xf32>
            %1128 = memref.load %9[%c0, %177] : memref<1x2xf32>
            %1129 = vector.broadcast %1128 : f32 to vector<8xf32>
            %1130 = math.fma %1127, %1129, %161 : vector<8xf32>
            %1131 = memref.load %10[%c0, %177] : memref<1x2xf32>
            %1132 = vector.broadcast %1131 : f32 to vector<8xf32>
            %1133 = math.fma %900, %1132, %1130 : vector<8xf32>
            scf.yield %416, %655, %894, %1133 : vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>
          }
