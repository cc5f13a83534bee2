// castiron emit --kernel gemv --shape 32x64 --codec q4_1 --isa avx2 --threads 2
// 1213 lines, sha256 7b7de014d56f37dd9827ddbf25c12d2c998d448acd4a4b8e29df253f906c86b1
          %161:4 = scf.for %156 = %c0 to %c1 step %c1 iter_args(%157 = %151, %158 = %152, %159 = %153, %160 = %154) -> (vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>) {
            %162 = arith.addi %150, %c9 : index
            %163 = arith.divui %162, %c2 : index
            %164 = arith.muli %163, %c2 : index
            %165 = arith.remui %162, %c2 : index
            %166 = arith.addi %143, %164 : index
            %167 = arith.addi %145, %164 : index
            %168 = arith.addi %143, %164 : index
            %169 = arith.addi %145, %164 : index
            %170 = arith.addi %143, %164 : index
            %171 = arith.addi %145, %164 : index
            %172 = arith.addi %143, %164 : index
            %173 = arith.addi %145, %164 : index
            %174 = arith.addi %143, %164 : index
            %175 = arith.addi %145, %164 : index
            %176 = arith.subi %150, %c0 : index
            %177 = vector.load %m1[%143, %150, %c0] : memref<2x2x320xi8>, vector<16xi8>
            %178 = vector.bitcast %177 : vector<16xi8> to vector<8xf16>
            %179 = arith.extf %178 : vector<8xf16> to vector<8xf32>
            %180 = vector.load %m1[%143, %150, %c7] : memref<2x2x320xi8>, vector<16xi8>
            %181 = vector.bitcast %180 : vector<16xi8> to vector<8xf16>
            %182 = arith.extf %181 : vector<8xf16> to vector<8xf32>
            %183 = vector.broadcast %c22 : i32 to vector<8xi32>
            %184 = arith.muli %176, %c10 : index
            %185 = vector.load %m1[%143, %150, %c3] : memref<2x2x320xi8>, vector<32xi8>
            %186 = vector.bitcast %185 : vector<32xi8> to vector<8xi32>
            %187 = arith.andi %186, %c23 : vector<8xi32>
            %188 = vector.bitcast %187 : vector<8xi32> to vector<32xi8>
            %189 = memref.load %8[%c0, %184] : memref<1x48xi32>
            %190 = vector.broadcast %189 : i32 to vector<8xi32>
            %191 = vector.bitcast %190 : vector<8xi32> to vector<32xi8>
            %192 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%188, %191) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
            %193 = arith.shrui %186, %c24 : vector<8xi32>
            %194 = arith.andi %193, %c23 : vector<8xi32>
            %195 = vector.bitcast %194 : vector<8xi32> to vector<32xi8>
            %196 = arith.addi %184, %c1 : index
            %197 = memref.load %8[%c0, %196] : memref<1x48xi32>
            %198 = vector.broadcast %197 : i32 to vector<8xi32>
            %199 = vector.bitcast %198 : vector<8xi32> to vector<32xi8>
            %200 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%195, %199) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
// 925 lines more
            %1116 = arith.addi %1107, %1115 : vector<16xi16>
            %1117 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.wd"(%1116, %c28) : (vector<16xi16>, vector<16xi16>) -> vector<8xi32>
            %1118 = arith.addi %1048, %1117 : vector<8xi32>
            %1119 = arith.shli %1047, %c20 : vector<8xi32>
            %1120 = arith.addi %1119, %1118 : vector<8xi32>
            %1121 = arith.sitofp %1120 : vector<8xi32> to vector<8xf32>
            %1122 = arith.mulf %1121, %893 : vector<8xf32>
            %1123 = memref.load %9[%c0, %176] : memref<1x2xf32>
            %1124 = vector.broadcast %1123 : f32 to vector<8xf32>
            %1125 = math.fma %1122, %1124, %160 : vector<8xf32>
            %1126 = memref.load %10[%c0, %176] : memref<1x2xf32>
            %1127 = vector.broadcast %1126 : f32 to vector<8xf32>
            %1128 = math.fma %896, %1127, %1125 : vector<8xf32>
            scf.yield %414, %652, %890, %1128 : vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>
          }
