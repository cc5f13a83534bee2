// castiron emit --kernel gemm --shape 16x64 --codec q4_1 --tokens 9 --numerics fast --isa avx2 --threads 2
// 1058 lines, sha256 260aebf4ec855e4901276329254376dbac255348e0dc34b984e604b99ae49c60
                %137:10 = scf.for %126 = %c0 to %c9 step %c1 iter_args(%127 = %116, %128 = %117, %129 = %118, %130 = %119, %131 = %120, %132 = %121, %133 = %122, %134 = %123, %135 = %124, %136 = %125) -> (vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>) {
                  %138 = arith.muli %126, %c7 : index
                  %139 = vector.load %2[%126, %105] : memref<2x16xf32>, vector<8xf32>
                  %140 = vector.load %3[%126, %105] : memref<2x16xf32>, vector<8xf32>
                  %141 = vector.load %2[%126, %107] : memref<2x16xf32>, vector<8xf32>
                  %142 = vector.load %3[%126, %107] : memref<2x16xf32>, vector<8xf32>
                  %143 = arith.addi %104, %c1 : index
                  %144 = arith.addi %104, %c9 : index
                  %145 = arith.addi %104, %c15 : index
                  %146 = arith.addi %104, %c4 : index
                  %147 = arith.divui %19, %c10 : index
                  %148 = arith.addi %147, %126 : index
                  %149 = vector.broadcast %c21 : i32 to vector<8xi32>
                  %150 = vector.broadcast %c21 : i32 to vector<8xi32>
                  %151 = vector.broadcast %c21 : i32 to vector<8xi32>
                  %152 = vector.broadcast %c21 : i32 to vector<8xi32>
                  %153 = vector.broadcast %c21 : i32 to vector<8xi32>
                  %154 = vector.load %1[%138, %105] : memref<16x16xi32>, vector<8xi32>
                  %155 = vector.load %1[%138, %107] : memref<16x16xi32>, vector<8xi32>
                  %156 = vector.bitcast %154 : vector<8xi32> to vector<32xi8>
                  %157 = vector.bitcast %155 : vector<8xi32> to vector<32xi8>
                  %158 = arith.muli %148, %c7 : index
                  %159 = memref.load %m0[%104, %158] : memref<9x16xi32>
                  %160 = vector.broadcast %159 : i32 to vector<8xi32>
                  %161 = vector.bitcast %160 : vector<8xi32> to vector<32xi8>
                  %162 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%156, %161) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                  %163 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%157, %161) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                  %164 = memref.load %m0[%143, %158] : memref<9x16xi32>
                  %165 = vector.broadcast %164 : i32 to vector<8xi32>
                  %166 = vector.bitcast %165 : vector<8xi32> to vector<32xi8>
                  %167 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%156, %166) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                  %168 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%157, %166) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                  %169 = memref.load %m0[%144, %158] : memref<9x16xi32>
                  %170 = vector.broadcast %169 : i32 to vector<8xi32>
                  %171 = vector.bitcast %170 : vector<8xi32> to vector<32xi8>
                  %172 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%156, %171) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                  %173 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%157, %171) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
                  %174 = memref.load %m0[%145, %158] : memref<9x16xi32>
                  %175 = vector.broadcast %174 : i32 to vector<8xi32>
                  %176 = vector.bitcast %175 : vector<8xi32> to vector<32xi8>
// 395 lines more
                  %572 = memref.load %m1[%146, %148] : memref<9x2xf32>
                  %573 = vector.broadcast %572 : f32 to vector<8xf32>
                  %574 = math.fma %571, %573, %135 : vector<8xf32>
                  %575 = memref.load %m2[%146, %148] : memref<9x2xf32>
                  %576 = vector.broadcast %575 : f32 to vector<8xf32>
                  %577 = math.fma %140, %576, %574 : vector<8xf32>
                  %578 = arith.mulf %514, %141 : vector<8xf32>
                  %579 = memref.load %m1[%146, %148] : memref<9x2xf32>
                  %580 = vector.broadcast %579 : f32 to vector<8xf32>
                  %581 = math.fma %578, %580, %136 : vector<8xf32>
                  %582 = memref.load %m2[%146, %148] : memref<9x2xf32>
                  %583 = vector.broadcast %582 : f32 to vector<8xf32>
                  %584 = math.fma %142, %583, %581 : vector<8xf32>
                  scf.yield %521, %528, %535, %542, %549, %556, %563, %570, %577, %584 : vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>
                }
